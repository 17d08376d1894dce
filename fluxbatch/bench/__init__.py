"""Measurements that anybody can repeat: python -m fluxbatch.bench.NAME. LOG.md holds what was learnt."""
