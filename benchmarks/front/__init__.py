"""The figures and pictures of the README and of the landing page."""
