"""MLflow: metrics and model versions of each node."""
