"""Parameters and state between steps: float32 in and out, other formats and meshes."""
