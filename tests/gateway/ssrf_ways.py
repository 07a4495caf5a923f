"""The ways into the network that a page has, and the forms of addresses that none may reach.

`{u}` is the trap and a path that names the way. Scripts write strings with backticks, because their
text stands inside attributes and other scripts.
"""

from __future__ import annotations


def _in_worker(script: str, options: str = "") -> str:
    blob = f"new Blob([`{script}`], {{{{type: `text/javascript`}}}})"
    return f"<script>new Worker(URL.createObjectURL({blob}){options})</script>"


# Ways that need no navigation.
WAYS = {
    # Elements.
    "img": '<img src="{u}">',
    "picture": '<picture><source srcset="{u}"><img></picture>',
    "input_image": '<input type="image" src="{u}">',
    "background": '<table background="{u}"><tr><td>x</td></tr></table>',
    "object": '<object data="{u}"></object>',
    "embed": '<embed src="{u}">',
    "video": '<video src="{u}" autoplay></video>',
    "video_source": '<video autoplay><source src="{u}" type="video/mp4"></video>',
    "poster": '<video poster="{u}"></video>',
    "track": '<video src="/" crossorigin><track src="{u}" default></video>',
    "audio": '<audio src="{u}" autoplay></audio>',
    "svg": '<svg><image href="{u}"/></svg>',
    "svg_filter": '<svg><filter id="f"><feImage href="{u}"/></filter>'
    '<rect width="9" height="9" filter="url(#f)"/></svg>',
    "svg_script": '<svg><script href="{u}"></script></svg>',
    "icon": '<link rel="icon" href="{u}">',
    "preload": '<link rel="preload" as="image" href="{u}">',
    "modulepreload": '<link rel="modulepreload" href="{u}">',
    "prefetch": '<link rel="prefetch" href="{u}">',
    "speculation": '<script type="speculationrules">{{"prefetch": [{{"source": "list", '
    '"urls": ["{u}"], "eagerness": "immediate"}}]}}</script>',
    "manifest": '<link rel="manifest" href="{u}">',
    # Styles.
    "stylesheet": '<link rel="stylesheet" href="{u}">',
    "css_import": '<style>@import url("{u}");</style>',
    "css_image": '<div style="background:url({u})">x</div>',
    "image_set": "<div style=\"background:image-set('{u}' 1x)\">x</div>",
    "list_style": '<ul style="list-style-image:url({u})"><li>x</li></ul>',
    "border": '<div style="border:9px solid;border-image:url({u}) 9">x</div>',
    "mask": '<div style="mask-image:url({u})">x</div>',
    "shape": '<div style="float:left;width:9px;height:9px;shape-outside:url({u})">x</div>',
    "content": "<style>s::before{{content:url({u})}}</style><s>x</s>",
    "font": "<style>@font-face{{font-family:f;src:url({u})}}i{{font-family:f}}</style><i>x</i>",
    # Scripts.
    "script": '<script src="{u}"></script>',
    "module": '<script type="module">import("{u}").catch(() => 0)</script>',
    "written": "<script>document.write(`<img src={u}>`)</script>",
    "shadow": "<p id=h></p><script>h.attachShadow({{mode: `open`}}).innerHTML = `<img src={u}>`"
    "</script>",
    "fetch": '<script>fetch("{u}").catch(() => 0)</script>',
    "keepalive": "<script>fetch(`{u}`, {{mode: `no-cors`, keepalive: true}}).catch(() => 0)"
    "</script>",
    "post": '<script>fetch("{u}", {{method: "POST", mode: "no-cors", body: "x"}}).catch(() => 0)'
    "</script>",
    "wasm": "<script>WebAssembly.instantiateStreaming(fetch(`{u}`)).catch(() => 0)</script>",
    "xhr": '<script>x = new XMLHttpRequest(); x.open("GET", "{u}"); x.send()</script>',
    "sync_xhr": "<script>try {{ y = new XMLHttpRequest(); y.open(`GET`, `{u}`, false); y.send() }}"
    " catch {{}}</script>",
    "beacon": '<script>navigator.sendBeacon("{u}", "x")</script>',
    "anchor_ping": '<a id="p" ping="{u}" href="#">x</a><script>p.click()</script>',
    "events": '<script>new EventSource("{u}")</script>',
    "websocket": '<script>new WebSocket("{u}".replace("http", "ws"))</script>',
    # Workers.
    "worker": _in_worker('fetch("{u}").catch(() => 0)'),
    "import_scripts": _in_worker('try {{ importScripts("{u}") }} catch {{}}'),
    "module_worker": _in_worker('import "{u}"', ", {{type: `module`}}"),
    "worker_events": _in_worker('new EventSource("{u}")'),
    "worker_socket": _in_worker('new WebSocket("{u}".replace("http", "ws"))'),
    "shared_worker": "<script>new SharedWorker(URL.createObjectURL(new Blob("
    "['fetch(\"{u}\").catch(() => 0)'])))</script>",
    "worklet": "<script>CSS.paintWorklet?.addModule(`{u}`).catch(() => 0)</script>",
    # Frames.
    "iframe": '<iframe src="{u}"></iframe>',
    "srcdoc": '<iframe srcdoc="<img src={u}>"></iframe>',
    "frame_of_frames": '<iframe srcdoc="<iframe src={u}></iframe>"></iframe>',
    "data_frame": '<iframe src="data:text/html,<img src={u}>"></iframe>',
    "blob_frame": "<iframe id=b></iframe><script>b.src = URL.createObjectURL(new Blob("
    "[`<img src={u}>`], {{type: `text/html`}}))</script>",
    "sandboxed": '<iframe sandbox="allow-scripts" srcdoc="<script>fetch(`{u}`).catch(() => 0)'
    '</script>"></iframe>',
    "frame_refresh": '<iframe srcdoc="<meta http-equiv=refresh content=0;url={u}>"></iframe>',
    "form_in_frame": '<iframe name="f"></iframe><form target="f" action="{u}" id="g"></form>'
    "<script>g.submit()</script>",
    "post_in_frame": '<iframe name="q"></iframe><form target="q" action="{u}" id="r" method="post">'
    '<input name="a" value="1"></form><script>r.submit()</script>',
    # Redirects of the public site.
    "redirect": '<img src="/to?{u}">',
    "script_redirect": '<script src="/to?{u}"></script>',
    "style_redirect": '<link rel="stylesheet" href="/to?{u}">',
    "fetch_redirect": '<script>fetch("/to?{u}", {{mode: "no-cors"}}).catch(() => 0)</script>',
    "event_redirect": "<script>new EventSource(`/to?{u}`)</script>",
    "frame_redirect": '<iframe src="/to?{u}"></iframe>',
}
# These must reach nothing under any policy: they would not pass the proxy, or are switched off.
NEVER = """<script>
navigator.serviceWorker?.register('/worker.js').catch(() => 0);
try {{
    peer = new RTCPeerConnection({{iceServers: [{{urls: 'stun:127.0.0.1:{p}'}},
        {{urls: 'turn:127.0.0.1:{p}?transport=tcp', username: 'a', credential: 'b'}}]}});
    peer.createDataChannel('x');
    peer.createOffer().then(offer => peer.setLocalDescription(offer));
}} catch {{}}
try {{ new WebTransport('https://127.0.0.1:{p}/').ready.catch(() => 0); }} catch {{}}
try {{ new TCPSocket('127.0.0.1', {p}); }} catch {{}}
window.open('http://127.0.0.1:{p}/never_popup');
</script>
<link rel="dns-prefetch" href="http://127.0.0.1:{p}/"><link rel="preconnect" href="{u}">
<form target="_blank" action="{u}_form" id="nf"></form><script>nf.submit()</script>
<a id="nw" href="{u}_window" target="_blank">x</a><script>nw.click()</script>
<iframe src="file:///etc/passwd"></iframe><iframe src="chrome://version"></iframe>
<iframe src="ftp://127.0.0.1:{p}/"></iframe><img src="ftp://127.0.0.1:{p}/x">
<img src="file:///etc/passwd"><iframe src="view-source:{u}"></iframe>
<iframe src="filesystem:{u}"></iframe><object data="file:///etc/passwd"></object>"""
# Headers of the public site that make a browser connect by itself.
HEADERS = (
    "Link: <{u}/link_header>; rel=preload; as=image",
    "Link: <{u}/never_hint>; rel=preconnect",
    'Report-To: {{"group": "g", "max_age": 60, "endpoints": [{{"url": "{u}/never_report"}}]}}',
    'NEL: {{"report_to": "g", "max_age": 60, "success_fraction": 1.0}}',
    "Content-Security-Policy-Report-Only: img-src 'none'; report-uri {u}/policy_header",
    'Alt-Svc: http/1.1="127.0.0.1:{p}", h3="127.0.0.1:{p}"',
)
HEADER_WAYS = frozenset({"link_header", "policy_header"})
# A headless browser shows no icon and installs nothing; worklets and speculation need HTTPS.
NOT_TAKEN = frozenset({"icon", "manifest", "speculation", "worklet"})
# Each form of an address that leads to this machine, to its network or to a metadata service.
HOSTS = (
    "127.0.0.1",
    "127.1",
    "127.8.8.8",
    "2130706433",
    "0x7f000001",
    "0177.0.0.1",
    "localhost",
    "localhost.",
    "sub.localhost",
    "LocalHost",
    "0.0.0.0",
    "0",
    "[::1]",
    "[::]",
    "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[2002:7f00:1::]",
    "[fe80::1]",
    "[fd00::1]",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.0.1",
    "100.64.0.1",
    "169.254.169.254",
    "169.254.170.2",
    "100.100.100.200",
    "[fd00:ec2::254]",
    "metadata.google.internal",
    "%31%32%37.0.0.1",
    "①②⑦.⓪.⓪.①",  # Browsers read these as digits.
    "loopback.example",
    "mixed.example",
    "six.example",
)
# For each of those forms: the address decides, and not the way.
FEW_WAYS = ("img", "fetch", "iframe", "websocket", "redirect", "worker")
NAVIGATIONS = {
    "meta": '<meta http-equiv="refresh" content="0;url={u}">',
    "location": '<script>location.href = "{u}"</script>',
    "replace": "<script>location.replace(`{u}`)</script>",
    "click": '<a id="a" href="{u}">x</a><script>a.click()</script>',
    "form": '<form method="post" action="{u}" id="g"></form><script>g.submit()</script>',
    "get_form": '<form action="{u}" id="g"><input name="a"></form><script>g.submit()</script>',
    "download": '<a id="a" href="{u}" download>x</a><script>a.click()</script>',
    "to_file": '<script>location.href = "file:///etc/passwd"</script>',
    "to_chrome": '<script>location.href = "chrome://version"</script>',
    "to_source": '<script>location.href = "view-source:{u}"</script>',
}
