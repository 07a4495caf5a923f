"""Our own gateway: a service that fetches and renders pages for workers and the SDK.

It has the fetch API of ZenRows, so that a worker uses it as it uses the hosted one
(docs/gateway.md). How one call passes the modules:

1. `server` reads the request and checks the key; `call` checks every parameter.
2. `service` admits the call within the limit of its key.
3. `fetch` fetches a plain page, or `browser` renders it; `guarding_proxy` is the browsers' network.
4. `service` decides whether the page counts as one; `errors` has the codes of the failures.

Direct fetches use the parts that need no browser: `content`, with `verdicts` and `extraction`
(docs/content.md).
"""
