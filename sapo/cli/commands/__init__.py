"""The commands of `sapo`. These modules import nothing heavy until a command runs."""
