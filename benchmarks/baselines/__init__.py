"""The programs that benchmarks/round.py runs side by side: ours, TRL's GRPOTrainer and genrl's GRPO game."""
