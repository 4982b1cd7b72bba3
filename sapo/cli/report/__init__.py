"""Pages and charts of runs."""
