"""The formats that a run's results can be had in; pure, and in step with one task at a time."""

from __future__ import annotations

from conveyor.domain.export import ExportFormat
from conveyor.domain.formats.csv_table import CsvTable
from conveyor.domain.formats.encoder import Encoder
from conveyor.domain.formats.json_lines import JsonLines
from conveyor.domain.formats.warc import Warc
from conveyor.domain.formats.zip_file import ZipFile

ENCODERS: dict[ExportFormat, type[Encoder]] = {
    ExportFormat.ZIP: ZipFile,
    ExportFormat.JSONL: JsonLines,
    ExportFormat.CSV: CsvTable,
    ExportFormat.WARC: Warc,
}
