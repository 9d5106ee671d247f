"""Pipelines from a file: `braid pipeline run orders.yaml`.

Owns what a pipeline file may say (`spec`), building and watching the query (`runner`), what it says meanwhile (`history`,
`screen`, `dashboard`) and how a failure is put into one sentence (`failures`). The connector itself knows nothing of pipelines.
"""
