"""Headlines of the papers behind this package, in small."""
