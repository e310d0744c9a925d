"""Domains and extensions that rarely lead to a page of text: the default blacklist.

A domain stands for its subdomains, too.
"""

_VIDEO = "dailymotion.com liveleak.com streamable.com tiktok.com twitch.tv vimeo.com vine.co"
_YOUTUBE = "youtu.be youtube.com youtube-nocookie.com"
_IMAGES = (
    "500px.com deviantart.com flickr.com gfycat.com giphy.com gyazo.com imgflip.com imgur.com "
    "instagram.com photobucket.com pinimg.com pinterest.com prnt.sc redgifs.com tinypic.com"
)
_AUDIO = "bandcamp.com mixcloud.com soundcloud.com spotify.com"
_SOCIAL = (
    "discord.com discord.gg facebook.com fb.com fb.me linkedin.com messenger.com redd.it "
    "reddit.com snapchat.com t.me twitter.com vk.com weibo.com whatsapp.com x.com"
)
_SHOPS = (
    "aliexpress.com alibaba.com amazon.ca amazon.co.uk amazon.com amazon.de amzn.to ebay.co.uk "
    "ebay.com etsy.com newegg.com redbubble.com teespring.com walmart.com"
)
_APPS = "apps.apple.com itunes.apple.com play.google.com steamcommunity.com steampowered.com"
_FILES = (
    "docs.google.com drive.google.com dropbox.com mediafire.com mega.nz onedrive.live.com "
    "photos.google.com rapidshare.com wetransfer.com zippyshare.com"
)
_SHORTENED = "bit.ly goo.gl is.gd j.mp ow.ly t.co tinyurl.com"
"""Names of other URLs, which a list may name, too."""
_FORMS = "change.org gofundme.com indiegogo.com kickstarter.com patreon.com surveymonkey.com"
_PAYWALLS = "barrons.com economist.com ft.com nytimes.com thetimes.co.uk wsj.com"
_ADULT = "onlyfans.com pornhub.com redtube.com xhamster.com xnxx.com xvideos.com youporn.com"

DOMAINS = frozenset(
    " ".join(
        [
            *(_VIDEO, _YOUTUBE, _IMAGES, _AUDIO, _SOCIAL, _SHOPS, _APPS, _FILES),
            *(_SHORTENED, _FORMS, _PAYWALLS, _ADULT),
        ]
    ).split()
)

_PICTURES = "ai avif bmp eps gif gifv heic ico jpeg jpg png psd svg tif tiff webp"
_SOUNDS = "aac aif aiff flac m3u m4a mid midi mp3 ogg opus wav wma"
_FILMS = "3gp avi flv m4v mkv mov mp4 mpeg mpg ogv swf vob webm wmv"
_ARCHIVES = "7z bz2 cab dmg gz iso jar rar tar tgz torrent xz zip zst"
_DOCUMENTS = "csv doc docx epub key mobi odp ods odt pdf pps ppt pptx ps rtf xls xlsx"
_PROGRAMS = "apk bin css deb dll exe ipa js json msi pkg rpm rss ttf woff woff2 xml"

EXTENSIONS = frozenset(
    " ".join((_PICTURES, _SOUNDS, _FILMS, _ARCHIVES, _DOCUMENTS, _PROGRAMS)).split()
)
"""Last parts of file names, in lower case."""
