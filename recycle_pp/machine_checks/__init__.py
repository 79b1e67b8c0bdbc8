"""Checks whether this machine can take part in a job, before the job starts. Never imports torch.

    python -m recycle_pp.machine_checks --run runs/mine --data tokens.bin --coordinator HOST0:29501

    checks = check_machine(Path("runs/mine"), Path("tokens.bin"))   # machine.py
    print(text(checks)); sys.exit(code(checks))                     # check.py; as_json(checks)

facts.py reads the facts of the machine. rules.py has one pure function for each Check. Only this machine is checked.
Under torchrun or SLURM, the checks of every machine and of every pair of them are not written yet.
"""
