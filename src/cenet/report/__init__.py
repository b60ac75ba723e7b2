"""The report: one page of HTML from runs of `cenet train` and measurements of `cenet diagnose`."""

from cenet.extras import require

require("report")

from cenet.report.pages import NOT_DIAGNOSED, write_diagnosis, write_diagnosis_page, write_page

__all__ = ["NOT_DIAGNOSED", "write_diagnosis", "write_diagnosis_page", "write_page"]
