"""The bus over Kafka."""
