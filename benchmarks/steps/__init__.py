"""Time of optimizer and training steps on this machine."""
