"""The processes of ``rehearsal``, which train ``examples/large_model.py``.

plan         the processes and their jobs
worker       a process that runs jobs, saves checkpoints and resumes from them
same_bits    counts the differing bits of two runs
"""
