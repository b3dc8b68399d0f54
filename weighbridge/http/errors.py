"""Why an exchange with a server failed.

ExchangeFailed
├── ConnectFailed   no connection: refused, unreachable, TLS refused, too slow
├── ConnectionCut   the connection ended before the reply was complete
├── ReplyTimeout    the reply did not begin, or did not go on, in time
└── BadReply        the reply breaks HTTP/1.1 framing or a limit
"""


class ExchangeFailed(Exception):
    """One exchange ended without a complete reply.

    `reply_begun` is True once any byte of the reply arrived; before that a request may be sent elsewhere.
    """

    def __init__(self, message: str, *, reply_begun: bool = False) -> None:
        super().__init__(message)
        self.reply_begun = reply_begun

    def again(self) -> "ExchangeFailed":
        """The same, to be raised by who keeps this one: an exception that was raised refers to all that was going on,
        its keeper too."""
        return type(self)(*self.args, reply_begun=self.reply_begun)


class ConnectFailed(ExchangeFailed):
    """No connection could be made; the server has seen nothing of the request."""


class ConnectionCut(ExchangeFailed):
    """The connection ended before the reply was complete."""


class ReplyTimeout(ExchangeFailed):
    """The reply did not begin, or did not go on, within its deadline."""


class BadReply(ExchangeFailed):
    """The reply breaks HTTP/1.1 framing or exceeds a limit."""
