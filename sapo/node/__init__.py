"""A node: Algorithm 1 of arXiv:2509.08721, round by round."""
