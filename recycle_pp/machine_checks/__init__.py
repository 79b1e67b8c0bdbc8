"""Checks whether this machine can take part in a job, before the job starts. Never imports torch.

    python -m recycle_pp.machine_checks --run runs/mine --data tokens.bin --coordinator HOST0:29501

    checks = check_machine(Path("runs/mine"), Path("tokens.bin"))   # machine.py
    print(text(checks)); sys.exit(code(checks))                     # check.py; as_json(checks)

facts.py reads the facts of the machine. rules.py has one pure function for each Check, and gpu_rules.py has those for
GPUs. exercise.py runs a device at full load, in a separate process. quick.py has the checks for the start of a job.

Under torchrun or SLURM, every machine checks itself, and machine 0 makes every pair of machines measure its link:

    with Surveyor(3, 29501, token) as surveyor: survey = surveyor.run()     # machine 0: surveyor.py
    code = take_part(launched(), token, look)                               # every machine: member.py, link.py
    print(table(survey, judge(survey)))                                     # several.py: pure
"""
