"""Functions that read jaxprs as graphs of nodes.

    graph ---> the values of a function as nodes, with all called functions inlined
    elementwise ---> programs for kernels, made from such a graph
    program ---> a traced loss as a list of calls, in which scans are visible

These modules do not depend on the rest of the package.
"""
