"""A real Apache Kafka with Python alone: brokers, topics, users, certificates, quotas."""
