"""Analysis of plans: possible next deaths, key figures, simulation, the 1F1B schedule, torch's CSV notation."""
