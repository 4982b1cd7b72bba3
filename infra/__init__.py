"""What runs around the swarm: brokers, stores, servers. It belongs to a checkout and is not in the wheel."""
