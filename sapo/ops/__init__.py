"""What keeps nodes running: supervisor, servers, archiver, judge, deployments, moves, doctor."""
