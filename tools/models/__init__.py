"""Models that are compiled, trained and measured here."""
