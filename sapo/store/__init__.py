"""What a node keeps: its journal, the history tables, MLflow."""
