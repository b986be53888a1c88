"""Jaxprs as graphs of nodes.

    nodes ---> what a jaxpr's values and calls are; reading them, running them
    graph ---> a function's values with all that it calls inlined
    elementwise ---> the programs that kernels run, read off such a graph
    program ---> a traced loss as a list of calls, in which scans are found

Nothing here depends on the rest of the package.
"""
