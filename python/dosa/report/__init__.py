"""``python -m dosa.report TRACES -o report.html``: one offline page about what dosa does on a model's activations.

`tables` measures traces and reads JSON lines; `page` draws the tables with the Vega-Lite charts of charts.json.
"""
