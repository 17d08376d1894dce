"""What is happening: the batch log, the GPU's sensors, the terminal, loggers, and what the logs say together."""
