"""Commands as jobs of a Ray cluster (Ray Jobs API)."""
