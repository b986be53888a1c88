"""Facts of programs compiled for GPUs and TPUs; nothing is run."""
