"""The command line of `conveyor scrape`. It imports the rest only when it runs, so that --help is
quick."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from conveyor.domain import limits

if TYPE_CHECKING:
    from conveyor.cli.scrape.display import Display
    from conveyor.cli.scrape.inputs import InputOptions, PageList
    from conveyor.cli.scrape.options import ScrapeOptions
    from conveyor.cli.scrape.run import Order
    from conveyor.config import Settings
    from conveyor.domain.submit.scraper_params import GatewaySupport

F = TypeVar("F", bound=Callable[..., Any])

SHOWN_MAX = 10
TIMEOUT_S = 60.0
_ACTIONS = ("retry_failed", "restart", "update")
# The options that the folder remembers, and the fields that they set.
_REMEMBERED = {
    "concurrency": ("concurrency",),
    "per_host": ("per_host",),
    "rate": ("rate",),
    "attempts": ("attempts",),
    "timeout": ("timeout_s",),
    "max_bytes": ("max_bytes",),
    "header": ("headers",),
    "user_agent": ("headers",),
    "cookie": ("headers",),
    "param": ("params",),
    "accept_status": ("accept_status",),
    "proxy": ("proxies",),
    "insecure": ("is_insecure",),
    "ignore_robots": ("ignores_robots",),
    "dedup": ("dedup",),
    "name": ("name",),
    "page_format": ("format",),
}


def _pairs(sign: str, form: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def parse(ctx: click.Context, option: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
        pairs = {}
        for text in texts:
            name, separator, value = text.partition(sign)
            if not name.strip() or not separator:
                raise click.BadParameter(f"{text!r} is not {form}.", ctx, option)
            pairs[name.strip()] = value.strip()
        return pairs

    return parse


def _cookies(_: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        if not text.partition("=")[0].strip() or "=" not in text:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE.", param=option)
    return texts


def _method(_: click.Context, option: click.Parameter, value: str | None) -> str | None:
    from conveyor.cli.scrape.inputs import DIRECT_METHODS

    method = None if value is None else value.upper()
    if method is not None and method not in DIRECT_METHODS:
        raise click.BadParameter(
            f"{value!r} is not one of {', '.join(DIRECT_METHODS)}.", param=option
        )
    return method


def _statuses(_: click.Context, option: click.Parameter, value: str | None) -> list[int]:
    words = [] if value is None else value.split(",")
    if not all(word.strip().isdigit() and len(word.strip()) == 3 for word in words):
        raise click.BadParameter(f"{value!r} is not a list such as 404,410.", param=option)
    return [int(word) for word in words]


def _bytes(_: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """Reads a size such as 500k, 10M or 1000000."""
    if value is None:
        return None
    units = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
    text = value.strip().lower().removesuffix("b").removesuffix("i")
    scale = units.get(text[-1:], 1)
    digits = text[:-1] if scale > 1 else text
    if not digits.isdigit() or not 1 <= int(digits) * scale <= limits.BODY_BYTES_MAX * 40:
        raise click.BadParameter(f"{value!r} is not a size such as 500k or 10M.", param=option)
    return int(digits) * scale


def _grouped(*options: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


input_options = _grouped(
    click.option(
        "--input-format",
        type=click.Choice(["text", "csv", "ndjson"]),
        help="Format of FILE; by default from its name or its first line.",
    ),
    click.option("--url-column", metavar="COLUMN", help="CSV column of the URL: name or number."),
    click.option("--id-column", metavar="COLUMN", help="CSV column of the id: name or number."),
    click.option("--delimiter", metavar="SIGN", help="CSV delimiter; by default a guess."),
    click.option("--skip-invalid", is_flag=True, help="Skip lines that are no pages."),
)

crawl_options = _grouped(
    click.option("--crawl", metavar="URL", help="Follow the links of this page's site."),
    click.option("--sitemap", metavar="URL", help="Fetch the pages of this sitemap."),
    click.option(
        "--depth",
        type=click.IntRange(1, limits.CRAWL_DEPTH_MAX),
        help="Links between the start of a crawl and a page at most.",
    ),
    click.option(
        "--match",
        metavar="TEXT",
        multiple=True,
        help="Follow only links whose URL contains TEXT; may be repeated.",
    ),
    click.option(
        "--max-pages",
        type=click.IntRange(1, limits.CRAWL_PAGES_MAX),
        default=10_000,
        show_default=True,
        help="Pages of a crawl at most.",
    ),
)

request_options = _grouped(
    click.option(
        "-H",
        "--header",
        metavar="NAME: VALUE",
        multiple=True,
        callback=_pairs(":", "NAME: VALUE"),
        help="Send this header; may be repeated.",
    ),
    click.option("-A", "--user-agent", metavar="TEXT", help="Send this User-Agent."),
    click.option(
        "-b",
        "--cookie",
        metavar="NAME=VALUE",
        multiple=True,
        callback=_cookies,
        help="Send this cookie; may be repeated.",
    ),
    click.option(
        "-X",
        "--method",
        metavar="METHOD",
        callback=_method,
        help="Of every request: GET, POST, HEAD, ...",
    ),
    click.option("-d", "--data", metavar="TEXT", help="Body, or @FILE; by default with POST."),
    click.option(
        "--param",
        metavar="KEY=VALUE",
        multiple=True,
        callback=_pairs("=", "KEY=VALUE"),
        help="Scraper parameter for a gateway; may be repeated.",
    ),
    click.option(
        "--accept-status",
        metavar="CODES",
        callback=_statuses,
        help="Statuses that also count as pages, such as 404,410.",
    ),
)

fetch_options = _grouped(
    click.option(
        "-c",
        "--concurrency",
        type=click.IntRange(1, limits.MAX_INFLIGHT_MAX),
        default=limits.MAX_INFLIGHT,
        show_default=True,
        help="Pages in flight at once.",
    ),
    click.option(
        "--per-host",
        type=click.IntRange(1, limits.MAX_INFLIGHT_MAX),
        help="Pages of one host in flight at once; by default 8, private hosts unlimited.",
    ),
    click.option(
        "--rate",
        type=click.FloatRange(limits.HOST_RATE_MIN, limits.HOST_RATE_MAX),
        help="Pages of one host that start in a second.",
    ),
    click.option(
        "--attempts",
        type=click.IntRange(1, limits.MAX_ATTEMPTS_MAX),
        default=limits.MAX_ATTEMPTS,
        show_default=True,
        help="Attempts per page.",
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(0.1, limits.SCRAPE_DEADLINE_S),
        default=TIMEOUT_S,
        show_default=True,
        help="Seconds for one attempt at a page.",
    ),
    click.option("--max-bytes", metavar="SIZE", callback=_bytes, help="Largest page; 25M."),
    click.option(
        "-x",
        "--proxy",
        metavar="URL|FILE",
        multiple=True,
        help="http://, https:// or socks5:// proxy, or a file of them; they take turns.",
    ),
    click.option("-k", "--insecure", is_flag=True, help="Accept any TLS certificate."),
    click.option("--ignore-robots", is_flag=True, help="Do not ask for robots.txt."),
    click.option(
        "--processes",
        type=click.IntRange(1, 16),
        help="Processes that fetch; by default one per core, up to 4, for a long list.",
    ),
    click.option(
        "--budget", metavar="UNIT=AMOUNT", help="The most to spend: credits=1000 or cost=12.50."
    ),
    click.option(
        "--api-key",
        metavar="KEY",
        envvar=["CONVEYOR_API_KEY", "ZENROWS_API_KEY"],
        show_envvar=True,
        help="API key for the gateway.",
    ),
)

output_options = _grouped(
    click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("scraped"),
        show_default=True,
        help="Folder for the pages. It belongs to one list.",
    ),
    click.option(
        "--name",
        metavar="PATTERN",
        default="{index}",
        show_default=True,
        help="Names of the files: {index}, {host}, {path}, {id}.",
    ),
    click.option(
        "--format",
        "page_format",
        type=click.Choice(["files", "jsonl", "warc"]),
        default="files",
        show_default=True,
        help="A file per page, pages.jsonl or pages.warc.gz.",
    ),
    click.option("--dedup", is_flag=True, help="Fetch equal requests of the list once."),
    click.option("--retry-failed", is_flag=True, help="Fetch the pages again that failed."),
    click.option("--update", is_flag=True, help="Fetch only URLs that the folder does not have."),
    click.option("--restart", is_flag=True, help="Remove the folder's pages and start over."),
    click.option(
        "--data-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Where the state of the folder is kept, instead of FOLDER/.conveyor.",
    ),
    click.option("--dry-run", is_flag=True, help="Only show what would be fetched."),
    click.option("-q", "--quiet", is_flag=True, help="Show nothing but errors."),
    click.option("--json", "as_json", is_flag=True, help="End with one line of JSON."),
)


@click.command()
@click.argument("sources", metavar="[FILE|URL]...", nargs=-1)
@output_options
@crawl_options
@input_options
@request_options
@fetch_options
@click.pass_context
def scrape(ctx: click.Context, /, sources: tuple[str, ...], **arguments: Any) -> None:
    """Scrape URLs, or the URLs in FILE (- for standard input), into a folder.

    FILE is text with one URL per line, CSV or NDJSON, plain or gzip. After Ctrl-C or a crash, the
    same command continues where it stopped.
    """
    started_at = time.monotonic()
    from conveyor.cli.scrape.display import Display

    display = Display(is_quiet=arguments["quiet"])
    sys.exit(_run(ctx, sources, arguments, display, started_at))


def _run(
    ctx: click.Context,
    sources: tuple[str, ...],
    arguments: dict[str, Any],
    display: Display,
    started_at: float,
) -> int:
    from conveyor.cli.scrape.run import Order, run_order

    settings: Settings = ctx.obj
    if sum(arguments[action] for action in _ACTIONS) > 1:
        raise click.UsageError("Give one of --retry-failed, --restart and --update.")
    is_crawl = bool(arguments["crawl"] or arguments["sitemap"])
    _refuse_with_crawl(ctx, sources, arguments, is_crawl=is_crawl)
    if (
        not sources
        and not is_crawl
        and not (arguments["output"] / ".conveyor").exists()
        and not arguments["data_dir"]
    ):
        raise click.UsageError("Give a FILE with one URL a line, - for standard input, or URLs.")
    options = options_from(settings, arguments)
    if arguments["insecure"]:
        display.say("Warning: --insecure accepts any certificate, so pages may come from anyone.")
    page_list = None
    if sources:
        display.phase(f"Reading {sources[0]}")
        page_list = _read(settings, sources, arguments, display)
        if arguments["dry_run"]:
            return _show_plan(page_list, dedup=arguments["dedup"])
    elif not is_crawl and (arguments["dry_run"] or arguments["update"]):
        raise click.UsageError("Give the list, too.")
    order = Order(
        settings=settings,
        folder=arguments["output"],
        options=options,
        source=" ".join(sources or filter(None, (arguments["crawl"], arguments["sitemap"])))[:200],
        page_list=page_list,
        command=_command(arguments),
        given_options=_given_fields(ctx),
        data_dir=arguments["data_dir"],
        processes=_processes(arguments),
        api_key=_api_key(settings, arguments["api_key"]),
        budget=_budget(settings, arguments["budget"]),
        retries_failed=arguments["retry_failed"],
        restarts=arguments["restart"],
        updates=arguments["update"],
        as_json=arguments["as_json"],
    )
    if is_crawl:
        return _crawl(order, arguments, display, started_at)
    return run_order(order, display, started_at).code


def _refuse_with_crawl(
    ctx: click.Context, sources: Sequence[str], arguments: Mapping[str, Any], *, is_crawl: bool
) -> None:
    from_command_line = click.core.ParameterSource.COMMANDLINE
    if not is_crawl:
        for name in ("depth", "match", "max_pages"):
            if ctx.get_parameter_source(name) is from_command_line:
                raise click.UsageError(f"--{name.replace('_', '-')} is for --crawl and --sitemap.")
        return
    if sources:
        raise click.UsageError("Give a list, or --crawl and --sitemap.")
    for name in ("dry_run", "update", "dedup", "method", "data"):
        if ctx.get_parameter_source(name) is from_command_line:
            raise click.UsageError(f"--{name.replace('_', '-')} does not go with a crawl.")
    if arguments["page_format"] != "files":
        raise click.UsageError("A crawl reads its pages again: it needs --format files.")


def _crawl(order: Order, arguments: Mapping[str, Any], display: Display, started_at: float) -> int:
    from conveyor.cli.scrape.crawl import CrawlOptions, run_crawl

    options = CrawlOptions(
        start=arguments["crawl"],
        sitemap=arguments["sitemap"],
        depth=arguments["depth"],
        match=arguments["match"],
        max_pages=arguments["max_pages"],
    )
    return run_crawl(order, options, display, started_at).code


def headers_from(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns the headers of every page."""
    headers = dict(arguments["header"])
    if arguments["user_agent"] is not None:
        headers["User-Agent"] = arguments["user_agent"]
    if arguments["cookie"]:
        cookies = [headers.pop(name) for name in list(headers) if name.lower() == "cookie"]
        headers["Cookie"] = "; ".join([*cookies, *arguments["cookie"]])
    return headers


def _support(settings: Settings, arguments: Mapping[str, Any]) -> GatewaySupport:
    from conveyor.bootstrap.scrape import find_scrape_support

    return find_scrape_support(settings, has_proxies=bool(arguments.get("proxy")))


def options_from(settings: Settings, arguments: Mapping[str, Any]) -> ScrapeOptions:
    from conveyor.cli.scrape.options import PageFormat, ScrapeOptions
    from conveyor.cli.scrape.page_writer import BadPattern, check_pattern
    from conveyor.domain.submit.scraper_params import InvalidParam, check_params

    headers = headers_from(arguments)
    params = {**arguments["param"], **({"custom_headers": headers} if headers else {})}
    try:
        check_pattern(arguments["name"])
        checked = check_params(params)
        _support(settings, arguments).check(checked.values)
    except (BadPattern, InvalidParam) as error:
        # The parameter that the headers of a job are sent as.
        raise click.UsageError(str(error).replace("custom_headers", "--header")) from None
    return ScrapeOptions(
        concurrency=arguments["concurrency"],
        per_host=arguments["per_host"],
        rate=arguments["rate"],
        attempts=arguments["attempts"],
        timeout_s=arguments["timeout"],
        max_bytes=arguments["max_bytes"],
        headers=checked.headers or {},
        params=checked.values,
        accept_status=arguments["accept_status"],
        proxies=_proxies(arguments["proxy"]),
        is_insecure=arguments["insecure"],
        ignores_robots=arguments["ignore_robots"],
        dedup=arguments["dedup"],
        name=arguments["name"],
        format=PageFormat(arguments["page_format"]),
    )


def _given_fields(ctx: click.Context) -> frozenset[str]:
    """Returns the remembered fields whose options are on the command line."""
    source = click.core.ParameterSource.COMMANDLINE
    return frozenset(
        field
        for option, fields in _REMEMBERED.items()
        if ctx.get_parameter_source(option) is source
        for field in fields
    )


def input_options_from(arguments: Mapping[str, Any], *, is_direct: bool = False) -> InputOptions:
    from conveyor.cli.scrape.inputs import (
        BODYLESS_METHODS,
        DIRECT_METHODS,
        GATEWAY_METHODS,
        InputOptions,
        content_type_of,
        read_body,
    )
    from conveyor.domain.model import ListFormat

    body, method = read_body(arguments.get("data")), arguments.get("method")
    if body is not None and method is None:
        method = "POST"
    if body is not None and method in BODYLESS_METHODS:
        raise click.UsageError(f"A {method} has no body: --data needs another --method.")
    methods = DIRECT_METHODS if is_direct else GATEWAY_METHODS
    if method is not None and method not in methods:
        raise click.UsageError(f"--method {method}: jobs and gateways take only GET and POST.")
    list_format = arguments["input_format"]
    return InputOptions(
        format=None if list_format is None else ListFormat(list_format),
        url_column=arguments["url_column"],
        id_column=arguments["id_column"],
        delimiter=arguments["delimiter"],
        method=method,
        body=body,
        content_type=None if body is None else content_type_of(body),
        methods=methods,
    )


def _read(
    settings: Settings, sources: Sequence[str], arguments: dict[str, Any], display: Display
) -> PageList:
    from conveyor.bootstrap.scrape import DIRECT
    from conveyor.cli.scrape.inputs import describe_flaws, read_pages
    from conveyor.domain.submit.target import TargetPolicy

    is_direct = settings.gateway_url == DIRECT
    targets = TargetPolicy(allow_private=settings.allow_private_targets) if is_direct else None
    page_list = read_pages(
        sources,
        input_options_from(arguments, is_direct=is_direct),
        targets,
        _support(settings, arguments),
        lambda count: display.phase(f"Reading {sources[0]}: {count:,} lines"),
    )
    name = "standard input" if sources[0] == "-" else sources[0]
    flawed = [page for page in page_list.pages if page.flaw is not None]
    if not page_list.pages:
        raise click.ClickException(f"{name} holds no URL. Give one a line.")
    if flawed:
        lines = describe_flaws(flawed, SHOWN_MAX)
        count = f"{len(flawed):,} of {len(page_list.pages):,} lines"
        if len(flawed) == len(page_list.pages) and arguments["skip_invalid"]:
            raise click.ClickException(f"{name} holds no URL. Give one a line.")
        if not arguments["skip_invalid"]:
            hint = "Correct them, or leave them out with --skip-invalid."
            raise click.ClickException("\n".join([f"{count} are no usable URL:", *lines, hint]))
        display.say("\n".join([f"{count} are left out:", *lines]))
    return page_list


def _show_plan(page_list: PageList, *, dedup: bool) -> int:
    from collections import Counter

    from conveyor.cli.scrape.display import counted
    from conveyor.cli.scrape.inputs import find_duplicates

    repeated = find_duplicates(page_list.pages) if dedup else {}
    hosts = Counter(
        host for index, host in enumerate(page_list.hosts) if host and index not in repeated
    )
    total = f"{counted(hosts.total(), 'page')} of {counted(len(hosts), 'host')}"
    click.echo(f"{total} would be fetched.")
    for host, count in hosts.most_common(SHOWN_MAX):
        click.echo(f"  {count:>9,}  {host}")
    return 0


def _proxies(texts: Sequence[str]) -> list[str]:
    """Returns the URLs of proxies. An option that is not a URL names a file, one URL a line."""
    from conveyor.bootstrap.scrape import check_proxy

    proxies: list[str] = []
    for text in texts:
        if "://" in text:
            proxies.append(text)
            continue
        try:
            lines = Path(text).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            cause = f"is neither a URL nor a file that can be read: {error.strerror}"
            raise click.UsageError(f"--proxy {text} {cause}.") from None
        except UnicodeDecodeError:
            raise click.UsageError(f"--proxy {text} is no text file.") from None
        words = (line.strip() for line in lines)
        proxies += [word for word in words if word and not word.startswith("#")]
    for text in proxies:
        try:
            check_proxy(text)
        except ValueError as error:
            raise click.UsageError(f"--proxy: {error}.") from None
    return proxies


def _processes(arguments: dict[str, Any]) -> int | None:
    processes: int | None = arguments["processes"]
    if arguments["page_format"] != "files" and (processes or 1) > 1:
        raise click.UsageError(f"--format {arguments['page_format']} is written by one process.")
    return processes


def _api_key(settings: Settings, api_key: str | None) -> str | None:
    from conveyor.bootstrap.scrape import gateway_has_key

    if api_key is None and not gateway_has_key(settings):
        raise click.UsageError(
            "The gateway needs a key: give --api-key, or set CONVEYOR_API_KEY or ZENROWS_API_KEY."
        )
    return api_key


def _budget(settings: Settings, value: str | None) -> Any:
    if value is None:
        return None
    from conveyor.bootstrap.scrape import DIRECT
    from conveyor.cli.limit_options import budget_from
    from conveyor.domain.budget import Unit
    from conveyor.schemas.requests import cap_from

    cap = cap_from(budget_from(value))
    if cap.unit is Unit.COST and settings.gateway_url != DIRECT and settings.credit_micros is None:
        raise click.UsageError("A budget in cost needs CONVEYOR_CREDIT_COST.")
    return cap


def _command(arguments: dict[str, Any]) -> str:
    """Returns the command that names the same folder, which remembers its list but no crawl."""
    words = ["conveyor", "scrape", "-o", str(arguments["output"])]
    is_crawl = arguments["crawl"] is not None or arguments["sitemap"] is not None
    for name in ("data_dir", "crawl", "sitemap", "depth", *(("max_pages",) if is_crawl else ())):
        if arguments[name] is not None:
            words += [f"--{name.replace('_', '-')}", str(arguments[name])]
    words += [word for pattern in arguments["match"] for word in ("--match", pattern)]
    return shlex.join(words)
