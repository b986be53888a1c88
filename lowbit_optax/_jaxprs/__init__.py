"""Jaxprs as graphs of nodes.

    graph ---> a function's values as nodes, with all that it calls inlined
    elementwise ---> the programs that kernels run, read off such a graph
    program ---> a traced loss as a list of calls, in which scans are found

Nothing here depends on the rest of the package.
"""
