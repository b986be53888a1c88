"""Other libraries beside this one."""
