"""`latentray bench`: throughput against transformers in the same run, and where a step's time goes."""
