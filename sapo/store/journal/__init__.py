"""A node's journal: one SQLite file with three transactions a round, and the outbox it feeds."""
