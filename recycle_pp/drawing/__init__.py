"""Pictures of schedules: a Plan or a Trace in, a terminal chart, a figure, a page or a table out.

    chart = Chart.of(plan)              # chart.py: what every picture is drawn from
    terminal.render(chart); figure.save([chart], "x.pdf"); page.save([Step("plan", [chart])], "x.html")

`python -m recycle_pp.visualize` is the command line over this.
"""
