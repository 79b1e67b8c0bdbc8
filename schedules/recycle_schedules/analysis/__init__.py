"""Reads plans for people and tools: deaths that may come, key figures, the classic schedule, torch's notation."""
