"""The policy: model, starter, checkpoints, engines, held-out evaluation."""
