"""What runs around the swarm: brokers, stores, servers."""
