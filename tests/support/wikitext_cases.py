"""Wikitext with every kind of markup, and the plain text of each, written by hand."""

CASES = {
    # Text
    "Plain words.": "Plain words.",
    "A '''bold''' and ''italic'' and '''''both''''' word.": "A bold and italic and both word.",
    "L''''amour''' and rock 'n' roll": "L'amour and rock 'n' roll",
    "Tom &amp; Jerry &lt;ref&gt; 5&nbsp;km &#8211; &#x2013; &unknown; AT&T": (
        "Tom & Jerry <ref> 5 km – – &unknown; AT&T"
    ),
    "one\ntwo\n\n\n\nthree": "one\ntwo\n\nthree",
    "two  spaces\tand tabs": "two spaces\tand tabs",
    "above\n----\nbelow": "above\n\nbelow",
    "__NOTOC__Text with __init__ __KEIN_INHALTSVERZEICHNIS__": "Text with __init__",
    "-{zh-hans:计算机;zh-hant:電腦}- and -{A|软件}-": "计算机 and 软件",
    # Links
    "[[Berlin]], [[Berlin|capital]]s and [[#Part|part]]": "Berlin, capitals and part",
    "[[Help:Page (topic)|]] and [[:Category:Cats]]": "Page and Category:Cats",
    "[[File:A.jpg|thumb|The [[cat]] of [[Ann|her]]]]Text": "Text",
    "[[Datei:A.jpg|mini|x]][[Bild:B.png]][[image:c.gif|20px]]Text": "Text",
    "Text\n[[Category:Cats| ]]\n[[Kategorie:Katzen]]\n[[de:Katze]]\n[[zh-min-nan:Niau]]": "Text",
    "a [[wikt:cat|cat]] and [[doi:10.1/x|paper]]": "a cat and paper",
    "[http://a.org the site], [http://a.org], [//b.org b], [mailto:a@b.org mail], http://c.org": (
        "the site, b, mail, http://c.org"
    ),
    "[1] and [sic] stay": "[1] and [sic] stay",
    # Templates
    "A{{citation needed|date=May}} word{{efn|{{nested|{{deep}}}}}}.": "A word.",
    "Ada ({{IPA|eɪdə}}; born 1815) and Bob ({{lang-x}}) and Cy (poet, {{born}})": (
        "Ada (born 1815) and Bob and Cy (poet)"
    ),
    "{{Infobox\n| name = x\n| image = [[File:A.jpg]]\n|}}\nText": "Text",
    "{{lang|fr|le [[chat|petit chat]]}}, {{nowrap|5 kg}}, {{convert|5|km|mi}} a{{ndash}}b": (
        "le petit chat, 5 kg, 5 km a–b"
    ),
    "{{convert|5|to|6|km|abbr=on}} and {{lang-de|1=Haus}} {{formatnum:1234}}": (
        "5 to 6 km and Haus 1234"
    ),
    "x {{{1|y}}} z {{#if:a|b|c}} {{PAGENAME}}": "x z",
    "A{{small{{a}}caps|b}} word{{small                                        caps|b}}.": "A word.",
    # Elements
    "A fact.<ref>A book.</ref> More.<ref name=a /> End.<ref name='b'>{{cite}}</ref>": (
        "A fact. More. End."
    ),
    "a<!-- hidden\n\nlines -->b\n<!-- alone -->\nc": "ab\nc",
    "<nowiki>[[x]] ''y'' {{z}} &lt;</nowiki> and <nowiki/>end": "[[x]] ''y'' {{z}} < and end",
    "E is <math>m c^2 ''x''</math>, water <chem>H2O</chem>": "E is $m c^2 ''x''$, water H2O",
    "<gallery>\nA.jpg|a [[cat]]\n</gallery>Text": "Text",
    "<syntaxhighlight lang=\"c\">\nint a[[2]];\n  b = '''c''';\n</syntaxhighlight>": (
        "int a[[2]];\n  b = '''c''';"
    ),
    "one<br/>two <small>three</small> <span style='x'>four</span> <sup>5</sup>": (
        "one\ntwo three four 5"
    ),
    "<blockquote>A quote.</blockquote>\n<div class=x>\nIn it.\n</div>": "A quote.\n\nIn it.",
    "<table><tr><td>a<table><tr><td>b</td></tr></table></td></tr></table>Text": "Text",
    "if a < b and c > d, <unknown>x</unknown>": "if a < b and c > d, <unknown>x</unknown>",
    "<noinclude>here</noinclude><includeonly>there</includeonly>": "here",
    "<timeline>\nx\n</timeline><score>c d</score>Text<references />": "Text",
    # Headings and lists
    "Text\n== One ==\n=== Two ===\nmore\n== Empty ==\n== '''Last''' ==\nend": (
        "Text\n\nOne\n\nTwo\n\nmore\n\nLast\n\nend"
    ),
    "Text\n== References ==\n{{reflist}}\n[[Category:x]]": "Text",
    "* a\n** b [[c]]\n# one\n: indented\n; term: meaning\n*\n* {{x}}": (
        "- a\n- b c\n- one\nindented\nterm: meaning"
    ),
    "* {{cite book}}.\n* {{x}}, volume 3\n* <math>x</math>\n* +": "- volume 3\n- $x$",
    "* 漢字\n* ،\n*\u3000\nText\n=============\nend": "- 漢字\n\nText\n\n=\n\nend",
    "A [[B:C (d)\u3000]] &lt;\u2003\n\u3000== E\u3000==\u2003\nend": "A B:C (d) <\n\nE\n\nend",
    # Tables
    "Text\n{| class=x\n! head\n|-\n| a || b\n{|\n| nested\n|}\n|}\nmore": "Text\n\nmore",
    "{|\n| {{x|\n|}}\n| b\n|}Text": "Text",
    # Unbalanced
    "{{Infobox\n| name = x\n\nText": "Text",
    "Text {{open and more": "Text open and more",
    "Text }} and ]] here": "Text and here",
    "Text [[open and [[link]] more": "Text open and link more",
    "[[File:a.jpg|open\nText": "Text",
    "Text <ref>open and more": "Text open and more",
    "Text </ref> more": "Text more",
    "Text <!-- open": "Text",
    "{|\n| row\n! head\n\nText": "Text",
    "Text\n|}\n| a left row": "Text\n\na left row",
    "{{a}}}} {{{{b}} x}} Text": "Text",
    "": "",
    "{{stub}}": "",
}
