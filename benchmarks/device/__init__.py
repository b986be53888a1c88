"""One command, ``first_device``, that tests and times the package on a new GPU.

first_device ---> parses the arguments, orders the jobs, writes the record
  supervisor ---> starts a process for each job, and shares the device among them
    job --------> runs in that process: compiles programs and sends figures back
      bits -----> are the results of the kernels equal to the reference's?
      step_times -> how long does a step take?
      training -> does a GPT-2 train, how fast, and in how much memory?
      first_compile -> how long do tracing, lowering and compiling take?
  first_device_page -> renders the record as Markdown
"""
