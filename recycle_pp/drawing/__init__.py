"""Pictures of schedules: from a Plan or a Trace to a terminal chart, a figure, a page or a table.

    chart = Chart.of(plan)              # chart.py: the input of every picture
    terminal.show([chart], Console()); figure.save([chart], "x.pdf"); page.save([Step("plan", [chart])], "x.html")

`python -m recycle_pp.visualize` is the command line.
"""
