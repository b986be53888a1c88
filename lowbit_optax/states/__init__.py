"""Parameters and state between steps: float32 weights, other formats, and meshes."""
