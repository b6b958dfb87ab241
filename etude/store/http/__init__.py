"""The rollout queue over HTTP: the server, and the queue that calls it.

server               the routes, on top of a queue
remote_queue         a queue of another process
client               its connections, retries and batches
forms                the form of each value in a request or a reply, from its type
checks               the check of a request, from the signature of its verb
batch                many writes in one request
headers              the headers of the API
openapi              the description of the routes
responses            status and body of a response, and the status of each error
reply_cache          cached replies, for clients that lost one
request_limits       the limits of heads, bodies, memory and time
request_middleware   the part that every request passes before an app sees it
connection           the limits of connections and heads
otlp                 spans in the format of OTLP/HTTP
server_thread        a server in a thread of this process
listener             the socket that a server listens on
background_thread    heavy work on large bodies, outside of the event loop
"""
