"""What the first minutes on a GPU are for, in one command: ``first_device``.

first_device ---> the command: arguments, the order, the record
  supervisor ---> each job in a process of its own, its limits, who has the device
    job --------> in that process: compiles, announces, and hands figures back
      bits -----> do kernels have the reference's bits?
      step_times -> how long is a step?
      training -> does a GPT-2 train, how fast, in how much memory?
      first_compile -> how long are tracing, lowering and compiling?
  first_device_page -> the record as a page of the documentation
"""
