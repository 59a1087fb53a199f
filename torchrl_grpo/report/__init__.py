"""``report.html``: everything that a run has recorded, in one file that needs no network.

``reader`` turns the files of a run folder into bounded data, and ``page_file`` puts them into a page, whose
own code is in ``page/``. A run calls ``write``, and ``serve`` shows a run in progress. ``differences``
compares runs.
"""
