"""Train a Llama-like model on a mesh, as `docs/large_model.md` explains.

model        weights, their shardings, the loss, and the batches
formats      the optimizers: clipping, schedule, weight format, loss scale
training     starts a run, trains it for a step, and converts it to another format
plan         the processes and their jobs
checkpoints  saves a run in the background, and restores it on any mesh
worker       a process that runs jobs, saves checkpoints and resumes from them
same_bits    counts the differing bits of two runs
"""
