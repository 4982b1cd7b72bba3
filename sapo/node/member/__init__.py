"""Members that only answer: no model, no update; a node in all else (docs/members.md)."""
