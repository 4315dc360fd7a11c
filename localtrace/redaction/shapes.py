"""The shapes of keys that issuers give out: a prefix, and the letters that follow it.

Only long unbroken words are searched, so most of a text is skipped fast. No expression repeats a
repetition, and those that may fail after many letters bound them, so time grows with the text only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from localtrace.redaction.matches import Match

_WORD = r"[A-Za-z0-9_-]"
_BASE64 = r"[A-Za-z0-9+/_-]"
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"

# Letters, digits and `_` or `-`; a digit or a capital tells keys from words such as
# sk-learn-based-classification.
_LOOSE = r"(?=[a-z_-]{0,60}[0-9A-Z])[A-Za-z0-9_-]{%d,}"
# The same with a stricter look, after a prefix that is a word of its own.
_MIXED = r"(?=[A-Za-z_-]{0,60}[0-9])(?=[a-z0-9_-]{0,60}[A-Z])[A-Za-z0-9_-]{%d,}"
_PLAIN = "[A-Za-z0-9]{%d,}"
_HEX = "[0-9a-fA-F]{%d,}"

_PREFIXED = (
    ("openai or anthropic key", "sk-", _LOOSE % 20),
    ("hugging face token", "hf_ api_org_", _PLAIN % 30),
    ("github token", "gh[opsur]_", _PLAIN % 30),
    ("github token", "github_pat_", r"\w{30,}"),
    ("gitlab token",
     "gl(?:pat|dt|rtr?|cbt|ptt|ft|imt|agent|oas|soat|ffct|wt)- GR1348941",
     _WORD + r"{20,}(?:\.[0-9a-z]{2}\.?[0-9a-z]{7,12})?"),
    ("gitlab token", "_gitlab_session=", _PLAIN % 20),
    ("aws access key", "A(?:KIA|SIA|BIA|CCA|3T[A-Z0-9])", "[A-Z0-9]{16}(?![A-Za-z0-9])"),
    ("aws bedrock key", "ABSK", _BASE64 + "{80,}={0,2}"),
    ("aws bedrock key", "bedrock-api-key-", _BASE64 + "{20,}={0,2}"),
    ("google api key", "AIza", _WORD + "{35}"),
    ("google api key", r"AQ\.", "Ab8" + _WORD + "{30,}"),
    ("google token", "GOCSPX-", _WORD + "{20,}"),
    ("google token", r"ya29\.", r"[A-Za-z0-9_.-]{20,}"),
    ("google token", "1//0", _WORD + "{30,}"),
    ("slack token", r"xox[a-z]-(?!xox) xox[a-z]\.xox[a-z]-", "[A-Za-z0-9%-]{10,}"),
    ("slack token", "x(?:app|wfp)-", "[0-9][A-Za-z0-9-]{20,}"),
    ("slack token", r"hooks\.slack\.com/(?:services|workflows|triggers)/", "[A-Za-z0-9/]{20,}"),
    ("w&b key", "wandb_v1_", r"\w{20,}"),
    ("w&b key", "local-", "[0-9a-f]{40}"),
    ("json web token", "eyJ",
     r"[A-Za-z0-9_-]{10,2000}+\.eyJ[A-Za-z0-9_-]{10,}(?:\.[A-Za-z0-9_-]*)?"),
    ("json web token", "eyJ",  # encrypted: five parts
     r"[A-Za-z0-9_-]{10,2000}+\.[A-Za-z0-9_-]{0,2000}+\.[A-Za-z0-9_-]{10,100}+\.[A-Za-z0-9_.-]{10,}"),
    ("1password key", "A3-",
     r"[A-Z0-9]{6}-(?:[A-Z0-9]{11}|[A-Z0-9]{6}-[A-Z0-9]{5})(?:-[A-Z0-9]{5}){3}"),
    ("1password key", "ops_eyJ", _BASE64 + "{40,}"),
    ("adobe key", "p8e-", _PLAIN % 32),
    ("age key", "AGE-SECRET-KEY-1", "[A-Z0-9]{40,}"),
    ("airtable token", "pat", r"[A-Za-z0-9]{14}\.[0-9a-f]{40,}"),
    ("alibaba key", "LTAI", _PLAIN % 16),
    ("anyscale token", "esecret_ aph0_", _PLAIN % 20),
    ("artifactory token", "AKCp cmVmd", _PLAIN % 50),
    ("asana token", r"[0-9]/[0-9]{14,18}(?:/[0-9]{14,18})?:", "[0-9a-f]{32}"),
    ("atlassian token", "AT(?:ATT3|CTT3|BB|OA)", r"[A-Za-z0-9_=-]{20,}"),
    ("authress key", "sc(?:auth)?_ ext_ authress_",
     r"[A-Za-z0-9]{5,30}\.[A-Za-z0-9]{4,6}\.acc[_-][A-Za-z0-9-]{10,32}\.[A-Za-z0-9+/_=-]{30,}"),
    ("azure secret", r"[A-Za-z0-9_~.]{3}[0-9]Q~", r"[A-Za-z0-9_~.-]{31,}"),
    ("bitwarden token", r"0\.[0-9a-f]{8}-", r"[0-9a-f-]{27}\.[A-Za-z0-9]{20,}"),
    ("brevo key", "x(?:key|smtp)sib-", r"[0-9a-f]{40,100}+-[A-Za-z0-9]{10,}"),
    ("browserbase key", "bb_live_", _WORD + "{16,}"),
    ("buildkite token", "bk(?:ua|at|ct)_", _PLAIN % 20),
    ("cerebras key", "csk-", _PLAIN % 30),
    ("circleci token", "CCIP(?:AT|RJ)_", r"[A-Za-z0-9_]{20,}"),
    ("clickhouse key", "4b1d", "(?=[A-Za-z0-9]{0,36}[A-Z])[A-Za-z0-9]{38}(?![A-Za-z0-9])"),
    ("clojars token", "CLOJARS_ clojars_", _PLAIN % 50),
    ("cloudflare key", r"v1\.0-", r"[0-9a-f]{24}-[0-9a-f]{100,}"),
    ("cohere key", "co_", _MIXED % 36),
    ("contentful token", "CFPAT-", _WORD + "{40,}"),
    ("databricks token", "d(?:api|ose|kea)", r"[0-9a-f]{32}(?:-\d)?"),
    ("daytona key", "dtn_", _PLAIN % 32),
    ("defined networking token", "dnkey-", "[A-Za-z0-9=_-]{60,}"),
    ("digitalocean token", "do[opr]_v1_", _HEX % 40),
    ("discord token", "[MNO][A-Za-z0-9_-]{23,26}\\.", r"[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,}"),
    ("discord webhook", r"discord(?:app)?\.com/api/webhooks/", r"[0-9]{15,}/[A-Za-z0-9_-]{40,}"),
    ("docker token", "dckr_(?:pat|oat)_", _WORD + "{20,}"),
    ("doppler token", r"dp\.(?:pt|st|ct|sa|scim|audit)\.", r"[A-Za-z0-9_.-]{30,}"),
    ("dropbox token", r"sl\.(?:u\.)?", _MIXED % 60),
    ("duffel token", "duffel_(?:test|live)_", r"[A-Za-z0-9_=-]{30,}"),
    ("dynatrace token", r"dt0[a-z][0-9]{2}\.", r"[A-Za-z0-9]{24}\.[A-Za-z0-9]{40,}"),
    ("e2b key", "e2b_", _HEX % 32),
    ("easypost token", "EZ[AT]K", _PLAIN % 40),
    ("elevenlabs key", "sk_", "[0-9a-f]{40,}"),
    ("facebook token", "EAA[A-Z]", _PLAIN % 60),
    ("facebook token", "[0-9]{15,16}(?:\\||%7C)", r"[0-9A-Za-z_-]{27,40}"),
    ("figma token", "fig[dour]_", _WORD + "{30,}"),
    ("firecrawl key", "fc-", "[0-9a-f]{32}"),
    ("fireworks key", "fw_", _MIXED % 22),
    ("flutterwave key", "FLW(?:SECK|PUBK)(?:_TEST)?-", r"[A-Za-z0-9]{12,}(?:-X)?"),
    ("fly token", "f(?:o1|m1[ar]|m2)_", _BASE64 + "{40,}={0,3}"),
    ("frame.io token", "fio-u-", r"[A-Za-z0-9_=-]{40,}"),
    ("grafana token", "glsa_", r"[A-Za-z0-9]{32}_[0-9A-Fa-f]{8}"),
    ("grafana token", "glc_ eyJrIjoi", _BASE64 + "{30,}={0,3}"),
    ("groq key", "gsk_", _PLAIN % 40),
    ("harness key", r"pat\. sat\.", r"[A-Za-z0-9_-]{22}\.[A-Za-z0-9]{24}\.[A-Za-z0-9]{20}"),
    ("heroku key", "HRKU-", _WORD + "{30,}"),
    ("honeycomb key", "hc(?:a|x)?ik_", _PLAIN % 30),
    ("hubspot token", "pat-(?:na|eu)[0-9]-", _UUID),
    ("ibm key", "s-s4t2(?:ud|af)-", _HEX % 40),
    ("infracost token", "ico-", _PLAIN % 32),
    ("jina key", "jina_", _PLAIN % 40),
    ("kaggle token", "KGAT_", _PLAIN % 30),
    ("langfuse key", "sk-lf- pk-lf-", _UUID),
    ("langsmith key", "lsv2_(?:pt|sk)_", r"[0-9a-f]{32}_[0-9a-f]{8,}"),
    ("langsmith key", "ls__", _HEX % 32),
    ("launchdarkly key", "api- sdk-", _UUID),
    ("linear key", "lin_(?:api|oauth)_", _PLAIN % 30),
    ("llamacloud key", "llx-", _PLAIN % 40),
    ("mailchimp key", "[0-9a-f]{32}-us", "[0-9]{1,2}(?![A-Za-z0-9])"),
    ("mailersend key", r"mlsn\.", _HEX % 40),
    ("mailgun key", "key- pubkey-", "[0-9a-f]{32}(?![A-Za-z0-9])"),
    ("mapbox token", r"sk\.eyJ tk\.eyJ", r"[A-Za-z0-9_-]{20,2000}+\.[A-Za-z0-9_-]{10,}"),
    ("maxmind key", r"[A-Za-z0-9]{6}_", r"[A-Za-z0-9]{29}_mmk"),
    ("mem0 key", "m0-", "(?=[A-Za-z]{0,36}[0-9])[A-Za-z0-9]{36,}"),
    ("modal token", "a[ks]-",
     "(?=[a-z0-9]{0,20}[A-Z])(?=[A-Za-z]{0,20}[0-9])[A-Za-z0-9]{22}(?![A-Za-z0-9-])"),
    ("neon key", "napi_", _PLAIN % 40),
    ("netlify token", "nf[pcubo]_", _PLAIN % 30),
    ("new relic key", "NR(?:AK|JS|II|SP|AA)-", _PLAIN % 18),
    ("notion token", "ntn_ secret_", _PLAIN % 40),
    ("npm token", "npm_ NPM_", _PLAIN % 36),
    ("nuget key", "oy2", "[a-z0-9]{43}(?![A-Za-z0-9])"),
    ("nvidia key", "nvapi-", _WORD + "{30,}"),
    ("octopus key", "API-", "[A-Z0-9]{25,}"),
    ("openshift token", "sha256~", _WORD + "{40,}"),
    ("paypal token", r"access_token\$(?:production|sandbox)\$", r"[0-9a-z]{16}\$[0-9a-f]{32}"),
    ("perplexity key", "pplx-", _PLAIN % 40),
    ("pinecone key", "pcsk_", _WORD + "{40,}"),
    ("plaid token", "access-(?:sandbox|development|production)-", _UUID),
    ("planetscale token", "pscale_(?:tkn|pw|oauth)_", r"[A-Za-z0-9_=.-]{30,}"),
    ("posthog key", "ph[xs]_", _PLAIN % 40),
    ("postman token", "PMAK-", r"[0-9a-fA-F]{24}-[0-9a-fA-F]{30,}"),
    ("prime intellect key", "pit_", _PLAIN % 32),
    ("prefect token", "pn[ub]_", _PLAIN % 36),
    ("pulumi token", "pul-", _HEX % 40),
    ("pypi token", "pypi-", _WORD + "{50,}"),
    ("razorpay key", "rzp_(?:live|test)_", _PLAIN % 14),
    ("readme token", "rdme_", _PLAIN % 60),
    ("replicate token", "r8_", _PLAIN % 36),
    ("resend key", "re_", "(?=[A-Za-z_]{0,30}[0-9])[A-Za-z0-9]{8}_[A-Za-z0-9]{20,}"),
    ("rubygems key", "rubygems_", _HEX % 40),
    ("runpod key", "rpa_", _PLAIN % 40),
    ("scaleway key", "SCW", "[A-Z0-9]{17}(?![A-Za-z0-9])"),
    ("scalingo token", "tk-us-", _WORD + "{40,}"),
    ("sendgrid key", r"SG\.", r"[A-Za-z0-9_=-]{1,40}[A-Za-z0-9_=.-]{40,}"),
    ("sentry token", "sntry[su]_", r"[A-Za-z0-9+/=_-]{40,}"),
    ("settlemint token", "sm_(?:aat|pat|sat)_", _PLAIN % 16),
    ("shippo token", "shippo_(?:live|test)_", _HEX % 32),
    ("shopify token", "shp(?:at|ca|pa|ss|ua|tka)_", _HEX % 30),
    ("sonar token", "sq[apu]_", _HEX % 40),
    ("sourcegraph token", "sgp_", r"(?:(?:[0-9a-fA-F]{16}|local)_)?[0-9a-fA-F]{40}"),
    ("square token", "sq0[a-z]{3}- EAAA", _WORD + "{22,}"),
    ("stripe key", "sk_(?:test|live|prod)_ rk_(?:test|live|prod)_ whsec_", r"[A-Za-z0-9+/]{10,}"),
    ("supabase key", "sbp_ sb_secret_", _WORD + "{20,}"),
    ("tailscale key", "tskey-", r"[A-Za-z0-9-]{16,}"),
    ("tavily key", "tvly-", _WORD + "{20,}"),
    ("teams webhook", r"webhook\.office\.com/webhookb2/",
     r"[A-Za-z0-9@/-]{30,}(?:/IncomingWebhook/[A-Za-z0-9/-]{30,})?"),
    ("telegram token", "bot[0-9]{5,16}: [0-9]{5,16}:", "A[A-Za-z0-9_-]{33,}"),
    ("tencent key", "AKID", _PLAIN % 30),
    ("terraform token", r"[A-Za-z0-9]{14}\.atlasv1\.", r"[A-Za-z0-9_=-]{50,}"),
    ("tinker key", "tml-", _PLAIN % 30),
    ("together key", "tgp_v1_", _WORD + "{30,}"),
    ("twilio key", "SK", "[0-9a-fA-F]{32}(?![A-Za-z0-9])"),
    ("typeform token", "tfp_", r"[A-Za-z0-9_.=-]{40,}"),
    ("vault token", r"hv[sbr]\.", _WORD + "{20,}"),
    ("vault token", r"s\.",
     "(?=[A-Za-z]{0,24}[0-9])(?=[a-z0-9]{0,24}[A-Z])[A-Za-z0-9]{24}(?![A-Za-z0-9_.(-])"),
    ("vercel token", "vc[pikar]_", _PLAIN % 24),
    ("voyage key", "pa- al-", "(?=[A-Za-z_-]{0,43}[0-9])[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])"),
    ("xai key", "xai-", _PLAIN % 40),
    ("yandex token", r"t1\.", r"[A-Za-z0-9_-]{10,2000}+={0,2}\.[A-Za-z0-9_-]{80,}"),
    ("yandex token", "AQVN YC(?=[A-Za-z0-9_-]{38}(?![A-Za-z0-9_-])) y[0-3]_", _MIXED % 35),
)  # fmt: skip
"""Shapes as (issuer, expressions of prefixes with blanks between them, expression of the rest)."""

NAMES = tuple(dict.fromkeys(name for name, _, _ in _PREFIXED))

_AFTER_ESCAPES = r"(?<=\\[bfnrt])|(?<=\\u[0-9A-Fa-f]{4})|(?<=%[0-9A-Fa-f]{2})|(?<=[0-9\[]m)"
"""Places right after an escape of JSON, URLs or terminals, where a key may begin too."""
_BEGIN = "(?<![A-Za-z0-9])"
"""Places where a word begins."""
_LONG_WORD = re.compile(r"[A-Za-z0-9_+/=.~:$%\\|-]{18,}+")


def long_words(text: str) -> list[re.Match[str]]:
    """Return the words of a text that are long enough to hold a key."""
    return [*_LONG_WORD.finditer(text)]


def find_shapes(text: str, words: list[re.Match[str]]) -> Iterator[Match]:
    """Yield the keys of known shapes in the long words of a text."""
    for word in words:
        start, end = word.span()
        is_escaped = "\\" in word[0] or "%" in word[0] or text[start - 1 : start] == "["
        for match in _shapes(is_escaped).finditer(text, start, end):
            yield Match(match.start(), match.end(), _name(match[0]))


@cache
def _shapes(is_escaped: bool) -> re.Pattern[str]:
    # Compiled at the first use, as that takes longer than importing this package should. Grouped
    # by the first letter, as `re` looks at it before it tries a branch.
    by_letter: dict[str, list[str]] = {}
    each = []
    for _, prefixes, rest in _PREFIXED:
        for prefix in prefixes.split(" "):
            if prefix.startswith("["):
                each.append(prefix + rest)
            else:
                by_letter.setdefault(prefix[0], []).append(prefix[1:] + rest)
    each += [f"{letter}(?:{'|'.join(rests)})" for letter, rests in by_letter.items()]
    begin = f"(?:{_BEGIN}|{_AFTER_ESCAPES})" if is_escaped else _BEGIN
    return re.compile(f"{begin}(?:{'|'.join(each)})")


def _name(key: str) -> str:
    return next(
        name
        for name, prefixes, rest in _PREFIXED
        if any(re.fullmatch(prefix + rest, key) for prefix in prefixes.split(" "))
    )
