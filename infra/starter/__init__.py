"""Teaches the small models that ship with sapo (`make starter`); no part of the wheel."""
