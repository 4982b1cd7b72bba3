"""Models that answer as one: token mixture, vote, route, parameter average."""
