"""Complete training programs that you can read from top to bottom and copy."""
