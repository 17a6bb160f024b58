"""Asks Kubernetes' API server one thing: METHOD URL CA TOKEN [KIND BODY]. Prints the status, and then
the answer. Fails if there is none."""

import ssl
import sys
import urllib.error
import urllib.request

method, url, authority, token, *content = sys.argv[1:]
request = urllib.request.Request(url, method=method)
request.add_header("Authorization", "Bearer " + token)
if content:
    request.add_header("Content-Type", content[0])
    request.data = content[1].encode()
trust = ssl.create_default_context(cafile=authority)
opener = urllib.request.build_opener(
    urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust)
)
try:
    with opener.open(request, timeout=30) as answer:
        status, text = answer.status, answer.read()
except urllib.error.HTTPError as error:
    status, text = error.code, error.read()
print(status)
print(text.decode())
