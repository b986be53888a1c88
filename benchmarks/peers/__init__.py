"""Compare this package with other libraries."""
